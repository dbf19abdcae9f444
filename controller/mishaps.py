"""What an action that could not be carried out means to the core: the one request or start it was for ends. Pure."""

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.protocol import FinishReason, InstanceState, InstanceStatus
from nearline.protocol.errors import ErrorInfo, Fault, InstanceFailed, NearlineError


def outcome(action: do.Action) -> happened.Event | None:
    """Return the event that settles what the core has booked for `action`, or None if it waits for nothing."""
    match action:
        case do.Dispatch(request_id, _, _, attempt):
            error = NearlineError("this request could not be handed to its instance; the controller's log says why")
            return happened.SequenceEnded(request_id, attempt, FinishReason.ERROR, error=ErrorInfo.of(error))
        case do.EnsureInstance(spec, node_id):
            failed = InstanceFailed("the start could not be asked of the node; the controller's log says why")
            status = InstanceStatus(
                spec.instance_id, spec.model_id, spec.digest, InstanceState.FAILED, error=ErrorInfo.of(failed)
            )
            return happened.InstanceChanged(node_id, status)
        case do.CopyCheckpoint(checkpoint, node_id):
            error = Fault("the copy could not be asked of the node; the controller's log says why")
            return happened.CopyFailed(node_id, checkpoint.digest, ErrorInfo.of(error))
        case _:
            return None
