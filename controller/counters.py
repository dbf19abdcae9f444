"""What the runtime has done since its start, for metrics. Words."""

from dataclasses import dataclass

from nearline.protocol import Seconds


@dataclass(slots=True)
class Counters:
    """What happened since the start, for metrics. A failed check means a defect of ours, never of a caller."""

    num_events: int = 0
    num_dispatches: int = 0
    num_redispatches: int = 0
    num_preemptions: int = 0
    num_rejects: int = 0
    num_starts: int = 0
    num_stops: int = 0
    num_core_errors: int = 0
    num_action_errors: int = 0
    num_check_failures: int = 0
    start_estimate_s: Seconds = 0.0
    start_error_s: Seconds = 0.0
