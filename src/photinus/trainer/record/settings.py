"""The settings that a script gives its optimizers and schedulers, and those that hold when a run is resumed.

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

from torch import nn
from torch.optim import Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ...errors import CheckpointError
from ...parallel.zero.sharded_optimizer import is_sharded
from ...parallel.zero.split_states import copy_state
from ..checkpoint.states import unwrap
from ..session.replicas import plain


class Settings:
    """The settings of this start's script. Made before anything is loaded or stepped.

    Args:
        objects: by the names that messages use; what is neither optimizer nor scheduler is left out.
        models: for the names of the optimizers' parameters; their own names stand before those, so that two models
            with equal layers are told apart.

    Attributes:
        given: for the checkpoint, plain.
    """

    def __init__(self, objects: Mapping[str, Any], models: Mapping[str, nn.Module]) -> None:
        self._optimizers = {name: each for name, each in objects.items() if isinstance(each, Optimizer)}
        self._schedulers = {name: each for name, each in objects.items() if _is_scheduler(each)}
        self._over = {name: self._optimizers_of(each) for name, each in self._schedulers.items()}
        options = {name: plain(_options(each)) for name, each in self._optimizers.items()}
        self.given = options | {name: plain(each.state_dict()) for name, each in self._schedulers.items()}
        self._models = models
        self.given["parameters"] = self._parameters()
        self.given["classes"] = {name: _classes(each) for name, each in (self._optimizers | self._schedulers).items()}

    def _parameters(self) -> dict[str, list[list[str]]]:
        """Return by optimizer the names of the parameters in its groups."""
        names = {id(p): own + name for own, m in self._models.items() for name, p in unwrap(m).named_parameters()}
        return {
            name: [[names.get(id(p), "") for p in group["params"]] for group in each.param_groups]
            for name, each in self._optimizers.items()
        }

    def parameters(self) -> dict[str, list[list[str]]]:
        """Return the same, with groups that were added since the start."""
        names: dict[str, list[list[str]]] = self.given["parameters"]
        is_same = all(len(each.param_groups) == len(names[name]) for name, each in self._optimizers.items())
        return names if is_same else self._parameters()  # snapshots ask often

    def add_groups(self, before: Mapping[str, Any], states: Mapping[str, Any]) -> None:
        """Add the parameter groups that a run had added after its start, as the script would do later.

        Raises:
            CheckpointError: which parameters they have is not known.
        """
        for name, optimizer in self._optimizers.items():
            theirs, ours = before["parameters"].get(name, []), self.given["parameters"][name]
            saved = states[name].get("param_groups", ())
            if len(saved) <= len(ours):
                continue
            by_name = {own + n: p for own, m in self._models.items() for n, p in unwrap(m).named_parameters()}
            more = theirs[len(ours) :]
            unnamed = [each for group in more for each in group if each not in by_name]
            if theirs[: len(ours)] != ours or len(theirs) != len(saved) or unnamed:
                raise CheckpointError(
                    f"{name} has {len(ours)} parameter groups here, and {len(saved)} in the checkpoint: were some "
                    f"added during the run? Add them before photinus.Loop, with the same parameters: "
                    f"optimizer.add_param_group(...). Or start over with resume='never'."
                )
            for names, group in zip(more, saved[len(ours) :], strict=True):
                options = {key: value for key, value in group.items() if key != "params"}
                optimizer.add_param_group({**copy_state(options), "params": [by_name[each] for each in names]})
                place = len(self.given[name])
                self.given[name] = [*self.given[name], *(before[name][place : place + 1] or [plain(options)])]
                self.given["parameters"][name] = [*self.given["parameters"][name], names]

    def in_our_order(self, name: str, before: Mapping[str, Any], state: Any) -> Any:
        """An optimizer's state with its parameters in the order of this one's: by their names. CheckpointError."""
        ours, theirs = self.given["parameters"].get(name), before["parameters"].get(name)
        if None in (ours, theirs) or theirs == ours:
            return state
        groups = zip(theirs, state["param_groups"], strict=True)
        keys = {n: key for own, group in groups for n, key in zip(own, group["params"], strict=True)}
        differing = sorted({n for own in ours for n in own} ^ set(keys))
        if differing or len(ours) != len(theirs):
            which = ", ".join(differing[:4]) or "others in each group"
            raise CheckpointError(f"the checkpoint's {name} steps other parameters than this one: {which}")
        pairs = zip(state["param_groups"], ours, strict=True)
        return {**state, "param_groups": [{**group, "params": [keys[n] for n in own]} for group, own in pairs]}

    def load(self, before: Mapping[str, Any], states: Mapping[str, Any], put_back: Callable[..., None]) -> list[str]:
        """Lets `put_back` load the checkpoint into all objects, then gives them what the script changed.

        Args:
            before: `given` of the start that saved the checkpoint.
            states: in the checkpoint, by name, of all objects but model and optimizer.
            put_back: is called with `states`, those of schedulers that made the run's steps again replaced.

        Returns:
            `name=now (was then)` of each setting that was changed.

        Raises:
            ValueError: a changed scheduler has no place for where the run is.
            CheckpointError: an optimizer is of another class, or has an option, that cannot step with the state.
        """
        before = {**self.given, **before}  # what was no scheduler then has nothing to compare with
        for name in self._optimizers:  # nor have groups that were added later
            before[name] = [*before[name], *self.given[name][len(before[name]) :]]
        for name, optimizer in self._optimizers.items():
            _check_state_holds(name, optimizer, self.given[name], before[name])
        replaced = self._find_replaced(before["classes"])
        counting = {name: each for name, each in self._schedulers.items() if _counts_steps(each)}
        changed = {name for name in counting if name in replaced or self._is_changed(name, before, states[name])}
        moving = {each for name in changed for each in self._over[name]}
        stepped = {name: each for name, each in counting.items() if name in changed or moving & {*self._over[name]}}
        _make_steps_again(stepped, states)
        ours = {name: copy_state({"groups": _options(each)})["groups"] for name, each in self._optimizers.items()}
        mine = {name: copy_state(each.state_dict()) for name, each in self._schedulers.items()}
        put_back({**states, **{name: mine[name] for name in (*stepped, *replaced) if name in mine}})
        notes = [f"{name}={self.given['classes'][name][0]} (was {was})" for name, was in replaced.items()]
        for name, scheduler in self._schedulers.items():
            if name in replaced:
                continue
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
                rate = plain(group.get("lr"))
                for key, value in own.items():
                    moved = name in moving and (key == "lr" or plain(value) != given[key])
                    if moved or given[key] != then.get(key):
                        group[key] = value
                if name in moving and rate != plain(group.get("lr")):
                    notes.append(f"{where}learning rate {show(group['lr'])} from here on (was {show(rate)})")
        return list(dict.fromkeys(notes))

    def _find_replaced(self, before: Mapping[str, list[str]]) -> dict[str, str]:
        """Return the class in the checkpoint of each object whose class has changed, by name.

        A new class of an optimizer has to inherit from the old one, or the old one from it, else CheckpointError.
        """
        classes = {name: (ours, before.get(name, ours)) for name, ours in self.given["classes"].items()}
        for name, (ours, theirs) in classes.items():
            if name in self._optimizers and ours[0] not in theirs and theirs[0] not in ours:
                raise CheckpointError(
                    f"{name} is {ours[0]}, which may not be able to step with what {theirs[0]} has in the checkpoint. "
                    f"Give it {theirs[0]}, or begin with resume='never'."
                )
        return {name: theirs[0] for name, (ours, theirs) in classes.items() if ours[0] != theirs[0]}

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


def _check_state_holds(name: str, optimizer: Optimizer, now: list[Any], then: list[Any]) -> None:
    """Refuses options that need what the state does not hold: torch makes it in the first step alone."""
    needing = ["amsgrad", "centered"] + ["momentum"] * isinstance(optimizer, RMSprop)
    for group, before in zip(now, then, strict=True):
        for option in needing:
            if group.get(option) and not before.get(option):
                raise CheckpointError(
                    f"{name} has {option}={show(group[option])}, which needs state that the checkpoint does not hold, "
                    f"saved with {option}={show(before.get(option))}. Set it back, or begin with resume='never'."
                )


def _classes(value: object) -> list[str]:
    """The names of its class and of those that this one was made from."""
    own = type(value).__mro__[2 if is_sharded(value) else 0 :]
    return [each.__qualname__ for each in own if each not in (Optimizer, LRScheduler, object)]


def _is_scheduler(value: Any) -> bool:
    has_verbs = all(callable(getattr(value, verb, None)) for verb in ("step", "state_dict"))
    return has_verbs and isinstance(getattr(value, "optimizer", None), Optimizer)


def _counts_steps(scheduler: Any) -> bool:
    """Return whether its rate depends only on the number of steps that it made."""
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
    if "last_epoch" not in state and "_schedulers" not in state:
        raise ValueError("the checkpoint's scheduler has a different class, and does not record how many steps it made")
    return int(state["last_epoch"]) if "last_epoch" in state else _step_of(state["_schedulers"][0])


def _has_new_function(scheduler: Any, saved: Mapping[str, Any]) -> bool:
    """Return whether a LambdaLR's functions, which no state holds, give a different rate at this step."""
    if hasattr(scheduler, "_schedulers"):
        return any(map(_has_new_function, scheduler._schedulers, saved["_schedulers"]))
    if not isinstance(scheduler, LambdaLR) or saved["last_epoch"] < 0:  # not its turn yet in a SequentialLR
        return False
    pairs = zip(saved["base_lrs"], scheduler.lr_lambdas, strict=True)
    return bool(plain([base * f(saved["last_epoch"]) for base, f in pairs]) != plain(saved["_last_lr"]))


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    own = ("params", "train_mode")  # the latter says which weights the parameters have (schedule-free optimizers)
    return [{name: value for name, value in group.items() if name not in own} for group in optimizer.param_groups]


def _rates(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options that schedulers set, or compute from."""
    return [{name: group[name] for name in group if "lr" in name or "momentum" in name} for group in groups]


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
            found.append(f"{where}{shown}={show(now[name])} (was {show(then.get(name))})")
    return found


def show(value: Any) -> str:
    """A setting in a few characters."""
    value = plain(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
