"""Which controllers this agent still obeys: never one that has been replaced. Pure."""


class Fence:
    """Remembers the newest leader of each deployment whose welcome was accepted, for the life of the agent.

    Tokens of different deployments are not compared: a state store begun anew counts from one again.
    """

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def admits(self, deployment: str, fencing_token: int) -> bool:
        """Tell whether a leader may be obeyed, and remember it if so."""
        newest = self._newest.get(deployment, fencing_token)
        if fencing_token < newest:
            return False
        self._newest[deployment] = fencing_token
        return True
