"""The door of an engine: the policy objects that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_basin.config import BasinConfig, ConfigError
from sglang_basin.engine.metrics import fault
from sglang_basin.engine.ranks import ONLY_RANK, Rank
from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.pausing import PauseSettings
from sglang_basin.policy.prediction import PeakPredictor
from sglang_basin.policy.priority import ArrivalOrder, SizeAwareOrder
from sglang_basin.policy.recording import RecordedDoor
from sglang_basin.policy.reservation import law_named
from sglang_basin.policy.shedding import SheddingSettings
from sglang_basin.predictor.deployed import DeployedPredictor
from sglang_basin.predictor.model_file import ModelFileError, named_model_path


def door_for(
    config: BasinConfig, capacity_tokens: int, predictor: PeakPredictor, rank: Rank = ONLY_RANK
) -> Door | RecordedDoor:
    """Build the door of a data-parallel rank. `capacity_tokens` is what its cache holds at most. Raises ConfigError for
    a recording that cannot be written."""
    watches = config.admission == "off"
    door = Door(
        DoorSettings(
            idle_timeout_s=config.idle_timeout_s,
            idle_floor_s=min(config.idle_floor_s, config.idle_timeout_s),
            final_grace_s=config.final_grace_s,
            hold_limit_s=config.hold_limit_s,
            ticket_grace_s=config.ticket_grace_s,
            max_sessions=config.max_live_sessions,
            max_queued=config.max_queue,
            enabled=not watches,
        ),
        law=law_named("current" if watches else config.admission, alpha=config.reserved_growth),
        budget=Budget(
            BudgetSettings(
                fixed_tokens=config.budget_tokens, knee_tokens=config.knee_tokens, band=config.adaptive_band
            ),
            capacity_tokens,
        ),
        order=SizeAwareOrder(config.order_tokens_per_s) if config.order == "size" else ArrivalOrder(),
        predictor=predictor,
        shedding=SheddingSettings(
            enabled=config.shedding == "on",
            head_wait_s=config.shed_wait_s,
            arrival_window_s=config.shed_window_s,
        ),
        pausing=PauseSettings() if config.pausing == "on" and not watches else None,
    )
    return door if config.record is None else RecordedDoor(door, recording(rank.file(config.record)))


def predictor_for(config: BasinConfig, rank: Rank = ONLY_RANK) -> DeployedPredictor:
    """Load the model and open the session log. Raises ConfigError naming the option when one of them cannot be used."""
    model = named_model_path(config.predictor)
    session_log = None if config.session_log is None else Path(rank.file(config.session_log))
    try:
        return DeployedPredictor.from_files(model, session_log)
    except ModelFileError as error:
        raise ConfigError(f"--basin-predictor {config.predictor}: {error}") from None
    except OSError as error:
        option = "--basin-predictor" if error.filename == str(model) else "--basin-session-log"
        raise ConfigError(f"{option} {error.filename}: {error.strerror}") from None


def recording(path: str) -> Callable[[str], Any]:
    """Where lines of a recording go: the end of a file, line by line. Raises ConfigError when it cannot be opened; a
    write that fails later, on a full disk say, costs that line and nothing else."""
    try:
        file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open as long as the engine runs
    except OSError as error:
        raise ConfigError(f"--basin-record {path}: {error.strerror}") from None

    def write(line: str) -> None:
        try:
            file.write(line)
        except OSError:
            fault("recording", "could not write to the recording; admission goes on without it")

    return write
