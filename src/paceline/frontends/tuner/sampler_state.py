"""The random generators of an Optuna sampler as plain data, so that a resumed search draws what the
undisturbed one would have drawn.

Optuna keeps generators in attributes of the sampler and of the samplers inside it, and nowhere on disk; its
own advice is to pickle the sampler. A pickle in a folder from elsewhere can run anything, so only the state
of each generator is kept, under the path of attributes that leads to it. A generator that Optuna makes at its
first use, as all are without a seed, is made here.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from optuna.samplers._lazy_random_state import LazyRandomState

_DEPTH = 5


def capture(sampler: object) -> dict[str, Any]:
    """Return the states of all generators of a sampler, by their path."""
    return {path: _to_plain(_state_of(generator)) for path, generator in _generators(sampler)}


def restore(sampler: object, states: Mapping[str, Any]) -> None:
    """Set the generators of a sampler that was made like the captured one."""
    for path, generator in _generators(sampler):
        if path in states:
            state = _from_plain(states[path])
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)


def _state_of(generator: np.random.RandomState | np.random.Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _generators(sampler: object) -> Iterator[tuple[str, np.random.RandomState | np.random.Generator]]:
    seen: set[int] = set()

    def walk(path: str, value: object, depth: int) -> Iterator[tuple[str, Any]]:
        if id(value) in seen or depth > _DEPTH:
            return
        seen.add(id(value))
        if isinstance(value, LazyRandomState):
            _ = value.rng  # makes the generator where there is none
        if isinstance(value, np.random.RandomState | np.random.Generator):
            yield path, value
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            for name, inner in sorted(vars(value).items()):
                yield from walk(f"{path}.{name}" if path else name, inner, depth + 1)

    yield from walk("", sampler, 0)


def _to_plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {str(key): _to_plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": state.dtype.str, "base64": base64.b64encode(state.tobytes()).decode()}
    return state.item() if isinstance(state, np.generic) else state


def _from_plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        if set(state) == {"dtype", "base64"}:
            return np.frombuffer(base64.b64decode(state["base64"]), dtype=state["dtype"]).copy()
        return {key: _from_plain(value) for key, value in state.items()}
    return state
