"""What a controller sees and says: SystemStatePacket in, AdaptationSignal out; the names are those of the
design documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.seeds.facts import SlotFacts
from runtime.seeds.health import HealthMap
from runtime.seeds.lifecycle import Lifecycle


@dataclass(frozen=True)
class HardwareContext:
    """`memory_available_gb`: free memory of the device that trains (of the machine, on the cpu);
    `memory_used`: share in use, 0 to 1; `supports_quantization`: int8 products on the device."""

    device_type: str = "cpu"
    memory_available_gb: float = float("nan")
    supports_quantization: bool = False
    memory_used: float = 0.0


@dataclass(frozen=True)
class SystemStatePacket:
    """One epoch boundary. `validation_accuracy` in percent, None where the caller measures none;
    `seed_states`: facts by slot id; `history`: validation losses of the epochs so far, this one last."""

    current_epoch: int
    validation_accuracy: float | None
    validation_loss: float
    hardware_context: HardwareContext
    health_map: HealthMap
    seed_states: Mapping[str, SlotFacts]
    history: tuple[float, ...] = ()
    step: int = 0
    corrupt: str = ""

    def in_state(self, *states: Lifecycle) -> list[SlotFacts]:
        """Slots in one of these states, in the order of slots."""
        return [facts for facts in self.seed_states.values() if facts.state in states]


@dataclass(frozen=True)
class AdaptationSignal:
    """What the trainer must do: `optimizer_rebuild_required`: groups were added or removed (ours is done in
    place; a wrapper that shards or copies optimizer state must look again). `emergency_rollback_required`
    with its `reason`: go back to the last good checkpoint."""

    optimizer_rebuild_required: bool = False
    emergency_rollback_required: bool = False
    reason: str = ""
    decisions: tuple[str, ...] = ()
