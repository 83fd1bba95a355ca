"""What a script gives its optimizers and schedulers, and what of it holds when a run is resumed.

One rule: **what the script gives differently than when the checkpoint was saved replaces what the checkpoint holds; all
else is the checkpoint's.** So a checkpoint holds what the script had given, too: options and schedulers' states before
the first step. The same script continues with the same bits, whatever it made of a learning rate meanwhile.

Most schedulers compute a rate from the one before, which says nothing of a new curve (at the end of a cosine it is 0).
A changed one makes the run's steps again, with all others of its optimizer: they are where a run along the new curve
would be. One that follows a metric (ReduceLROnPlateau) has its settings replaced, but neither its rate nor what it has
seen.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ...parallel.zero.split_states import copy_state


class Settings:
    """What this start's script gave. Made before anything is loaded or stepped.

    Args:
        objects: by the names that messages use; what is neither optimizer nor scheduler is left out.

    Attributes:
        given: for the checkpoint, plain.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._optimizers = {name: each for name, each in objects.items() if isinstance(each, Optimizer)}
        self._schedulers = {name: each for name, each in objects.items() if _is_scheduler(each)}
        self._over = {name: self._optimizers_of(each) for name, each in self._schedulers.items()}
        options = {name: _comparable(_options(each)) for name, each in self._optimizers.items()}
        self.given = options | {name: _comparable(each.state_dict()) for name, each in self._schedulers.items()}

    def load(self, before: Mapping[str, Any], states: Mapping[str, Any], put_back: Callable[..., None]) -> list[str]:
        """Lets `put_back` load the checkpoint into all objects, then gives them what the script changed.

        Args:
            before: `given` of the start that saved the checkpoint.
            states: in the checkpoint, by name, of all objects but model and optimizer.
            put_back: is called with `states`, those of schedulers that made the run's steps again replaced.

        Returns:
            A line with both values of each setting that was changed, if any was.

        Raises:
            ValueError: a changed scheduler has no place for where the run is.
        """
        before = {**self.given, **before}  # what was no scheduler then has nothing to compare with
        counting = {name: each for name, each in self._schedulers.items() if _counts_steps(each)}
        changed = {name for name in counting if self._is_changed(name, before, states[name])}
        moving = {each for name in changed for each in self._over[name]}
        stepped = {name: each for name, each in counting.items() if name in changed or moving & {*self._over[name]}}
        _make_steps_again(stepped, states)
        ours = {name: copy_state({"groups": _options(each)})["groups"] for name, each in self._optimizers.items()}
        mine = {name: copy_state(each.state_dict()) for name, each in self._schedulers.items()}
        put_back({**states, **{name: mine[name] for name in stepped}})
        notes = []
        for name, scheduler in self._schedulers.items():
            kept = {key: mine[name][key] for key, now in self.given[name].items() if now != before[name].get(key)}
            notes += _differences(f"{name} ", self.given[name], before[name])
            if kept and name not in stepped:
                scheduler.load_state_dict({**copy_state(scheduler.state_dict()), **kept})
        for name, optimizer in self._optimizers.items():
            for group, own, given, then in zip(
                optimizer.param_groups, ours[name], self.given[name], before[name], strict=True
            ):
                where = "" if name == "optimizer" else f"{name} "
                notes += _differences(where, given, then)
                rate = _comparable(group.get("lr"))
                for key, value in own.items():
                    moved = name in moving and (key == "lr" or _comparable(value) != given[key])
                    if moved or given[key] != then.get(key):
                        group[key] = value
                if name in moving and rate != _comparable(group.get("lr")):
                    notes.append(f"{where}learning rate {_show(group['lr'])} from here on (was {_show(rate)})")
        text = ", ".join(dict.fromkeys(notes))
        return [f"what the script changed replaces what the checkpoint holds: {text}"] if notes else []

    def _optimizers_of(self, scheduler: Any) -> list[str]:
        """Return the optimizers whose rates it sets: the one it was given, and a wrapper with the same groups (SAM)."""
        groups = {id(group) for group in scheduler.optimizer.param_groups}
        return [n for n, each in self._optimizers.items() if any(id(group) in groups for group in each.param_groups)]

    def _is_changed(self, name: str, before: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        scheduler = self._schedulers[name]
        return (
            self.given[name] != before[name]
            or any(_rates(self.given[each]) != _rates(before[each]) for each in self._over[name])
            or _has_new_function(scheduler, state)
        )


def _is_scheduler(value: Any) -> bool:
    has_verbs = all(callable(getattr(value, verb, None)) for verb in ("step", "state_dict"))
    return has_verbs and isinstance(getattr(value, "optimizer", None), Optimizer)


def _counts_steps(scheduler: Any) -> bool:
    """Whether its rate depends on how many steps it made, and on nothing else."""
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return False
    return all(each.default is not each.empty for each in inspect.signature(scheduler.step).parameters.values())


def _make_steps_again(schedulers: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Make the steps that the checkpoint's schedulers had made, in turn: one may compute from the rate of another."""
    wanted = {name: _step_of(saved[name]) for name in schedulers}
    made = {name: _step_of(scheduler.state_dict()) for name, scheduler in schedulers.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer made none
        # Of different counts (SWALR) one began where the other ended, or both multiply and no order matters.
        for steps, step in ((count, step) for count in dict.fromkeys(wanted.values()) for step in range(count)):
            for name in [each for each in schedulers if wanted[each] == steps and made[each] <= step]:
                try:
                    schedulers[name].step()
                except ValueError as error:
                    raise ValueError(
                        f"{name} ({type(schedulers[name]).__name__}) was changed and has no place at step {steps}, "
                        f"where the checkpoint is: {error}. Give it a longer schedule, or start over with "
                        f"resume='never'."
                    ) from error


def _step_of(state: Mapping[str, Any]) -> int:
    # ChainedScheduler has no count of its own.
    return int(state["last_epoch"]) if "last_epoch" in state else _step_of(state["_schedulers"][0])


def _has_new_function(scheduler: Any, saved: Mapping[str, Any]) -> bool:
    """Whether a LambdaLR's functions, which no state holds, give another rate where the run is."""
    if hasattr(scheduler, "_schedulers"):
        return any(map(_has_new_function, scheduler._schedulers, saved["_schedulers"]))
    if not isinstance(scheduler, LambdaLR) or saved["last_epoch"] < 0:  # not its turn yet in a SequentialLR
        return False
    pairs = zip(saved["base_lrs"], scheduler.lr_lambdas, strict=True)
    return bool(_comparable([base * f(saved["last_epoch"]) for base, f in pairs]) != _comparable(saved["_last_lr"]))


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _rates(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options that schedulers set, or compute from."""
    return [{name: group[name] for name in group if "lr" in name or "momentum" in name} for group in groups]


def _comparable(value: Any) -> Any:
    """A value as lists, dicts, numbers and text; of all else the class."""
    value = value.tolist() if hasattr(value, "tolist") else value  # tensors, and numpy's
    if isinstance(value, Mapping):
        return {str(name): _comparable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__qualname__


def _differences(where: str, now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """`name=now (was then)` for each setting with a name of its own."""
    derived = {"last_epoch", "base_lrs"} | ({"lr"} if "initial_lr" in now else set())  # follow from what is named
    found = []
    for name in now:
        if name == "_schedulers":
            for inner, was in zip(now[name], then.get(name, []), strict=False):
                found += _differences(where, inner, was)
        elif now[name] != then.get(name) and name not in derived and (name == "_milestones" or name[0] != "_"):
            shown = name.removeprefix("initial_").removeprefix("_")
            found.append(f"{where}{shown}={_show(now[name])} (was {_show(then.get(name))})")
    return found


def _show(value: Any) -> str:
    value = _comparable(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
