"""Do all ranks still train the same model, with the same hyperparameters?

What a rank was given is compared when a model is wrapped and when a loop is made; what may drift later rides along with
the loop's exchange of losses, an all-reduce that sums: each rank fills its own three places of a vector that is zero
elsewhere. Two digests of 48 bits (whole numbers that float64 holds exactly) and what the second one took:

| digest of | how often | what it takes |
|---|---|---|
| the optimizers' options | at each exchange | some microseconds per group of parameters |
| all parameters | before each checkpoint, and as often as costs at most 0.5 % of the training | one read of them |

With a GPT of 18 M parameters and a checkpoint every 8 steps (2 ranks on 2 busy cores) all of it takes 0.29 % of the
time: 18 ms before a save of 1.2 s.

Only where a digest differs do the ranks exchange more, to name what and where. A parameter's own digest is that of
photinus.parallel.exchange.parameter_digest, with which DDP by itself compares a part of the parameters every few steps.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ...errors import ModelMismatchError
from ...parallel import strategy_of, unwrap_compiled
from ...parallel.exchange.agreement import JSON, check_alike, gather_per_rank
from ...parallel.exchange.parameter_digest import digest_of
from ...world.ranks import name_ranks
from ..checkpoint.states import unwrap
from .session import Session

__all__ = ["Replicas", "describe_replicas"]

_WIDTH = 3
_COST = 0.005  # of the time of the steps, at most
_DIGEST_BYTES = 6  # fewer than the 53 bits of a float64's fraction


def describe_replicas(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, JSON]:
    """What has to be equal on all ranks of optimizers: class, options, and which parameters each group steps."""
    names = {id(parameter): name for model in models for name, parameter in unwrap(model).named_parameters()}
    found: dict[str, JSON] = {}
    for place, optimizer in enumerate(optimizers):
        which = f"optimizer {place + 1}" if place else "optimizer"
        found[which] = type(optimizer).__qualname__
        for index, group in enumerate(optimizer.param_groups):
            where = f"{which}, group {index}, "
            found |= {where + name: plain(value) for name, value in group.items() if name != "params"}
            for number, parameter in enumerate(group["params"]):
                found[f"{where}parameter {number}"] = names.get(id(parameter), str(list(parameter.shape)))
    return found


def plain(value: object) -> JSON:
    """A hyperparameter as JSON holds it: numbers, text and lists of such are compared; of all else the class."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return type(value).__qualname__


class Replicas:
    """Whether the ranks' models and optimizers are still alike. All ranks call its methods together.

    Args:
        session: of this rank.
        models: of those that are whole on each rank and exchange their gradients, parameters are compared.
        optimizers: whose options are compared.
        compare_parameters: False where ranks differ on purpose for a while.
    """

    def __init__(
        self,
        session: Session,
        models: Iterable[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        compare_parameters: bool,
    ) -> None:
        self._session = session
        self._alone = session.world_size == 1
        self._models = [unwrap_compiled(model) for model in models if compare_parameters and not self._alone]
        self._models = [model for model in self._models if _is_replicated(model, session.world_size)]
        self._optimizers = optimizers
        self._trained_s = 0.0  # since the digest before
        self._pause_s = 0.0  # to the next one

    def mine(self, *, saves: bool) -> list[float]:
        """This rank's digests, with zeros in the other ranks' places: 3 * world size values to be summed.

        Args:
            saves: a checkpoint follows, so parameters are looked at however long ago that was done; equal on all ranks.
        """
        if self._alone:
            return []
        began_s = time.perf_counter()
        options = [[plain(v) for k, v in g.items() if k != "params"] for o in self._optimizers for g in o.param_groups]
        own = [_digest(repr(options).encode()), 0.0, 0.0]
        if self._models and (saves or self._trained_s >= self._pause_s):
            sums = self._sums().values()
            own[1] = _digest(struct.pack(f"<{len(sums)}q", *sums))
            own[2] = time.perf_counter() - began_s
        vector = [0.0] * (_WIDTH * self._session.world_size)
        vector[_WIDTH * self._session.rank : _WIDTH * (self._session.rank + 1)] = own
        return vector

    def compare(self, everyone: Sequence[float], *, step: int, seconds: float) -> None:
        """Takes the sum of what `mine` returned on the ranks, and the seconds of the steps since the last call.

        Raises:
            ValueError: an optimizer has other options on some rank; on all ranks, says which and both values.
            ModelMismatchError: the ranks hold different parameters; on all ranks, names ranks and parameters.
        """
        if self._alone:
            return
        self._trained_s += seconds
        if max(everyone[2::_WIDTH]) > 0.0:
            self._trained_s, self._pause_s = 0.0, max(everyone[2::_WIDTH]) / _COST
        if len(set(everyone[::_WIDTH])) > 1:
            check_alike(
                describe_replicas(self._models, self._optimizers), f"the ranks' optimizers differ after step {step}"
            )
        if len(set(everyone[1::_WIDTH])) > 1:
            ranks = gather_per_rank(self._sums())
            raise ModelMismatchError(f"after step {step} {_difference(ranks)}")

    def _sums(self) -> dict[str, int]:
        """Each parameter's digest, by name."""
        sums: dict[str, torch.Tensor] = {}
        for place, model in enumerate(self._models):
            ignored: set[str] = getattr(model, "parameters_to_ignore", set())
            for name, parameter in unwrap(model).named_parameters():
                if name not in ignored:
                    sums[f"state model {place}: {name}" if place else name] = digest_of(parameter.detach())
        values = torch.stack([each.to(self._session.device) for each in sums.values()]).tolist() if sums else []
        return dict(zip(sums, values, strict=True))


def _is_replicated(model: nn.Module, world_size: int) -> bool:
    group = getattr(model, "process_group", None)
    return strategy_of(model).replicates and (group is None or group.size() == world_size)


def _digest(data: bytes) -> float:
    return float(int.from_bytes(hashlib.sha256(data).digest()[:_DIGEST_BYTES], "little"))


def _difference(ranks: Sequence[Mapping[str, int]]) -> str:
    """Who holds what, as a sentence's end; who is wrong can be told only where most ranks agree."""
    differing = [name for name in ranks[0] if len({each.get(name) for each in ranks}) > 1]
    first = differing[0]
    sides: dict[int | None, list[int]] = {}
    for rank, each in enumerate(ranks):
        sides.setdefault(each.get(first), []).append(rank)
    more = f" and {len(differing) - 1} more of {len(ranks[0])} parameters" if len(differing) > 1 else ""
    most = max(sides.values(), key=len)
    others = [rank for side in sides.values() if side is not most for rank in side]
    if len(most) > len(others):
        differ = "differs" if len(others) == 1 else "differ"
        told = f"{name_ranks(others)} {differ} from the other {len(most)} ranks in the values of {first}{more}"
    else:
        told = f"{' and '.join(map(name_ranks, sides.values()))} hold different values of {first}{more}"
    return (
        f"{told}. Every rank has to make the same changes: was a weight loaded or set, or an optimizer stepped, on one "
        f"rank only? No checkpoint of this was saved; go on from the last one. If ranks are to differ for a while "
        f"(local SGD), or round differently because their processors do, give the loop compare_parameters=False, and "
        f"photinus.wrap check_ranks=False."
    )
