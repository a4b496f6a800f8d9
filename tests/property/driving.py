"""What the drives share: episodes of random events from one seed, and what was seen in them."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from typing import Protocol

EVENTS_PER_EPISODE = 400


class World(Protocol):
    """What is driven; `seen` counts what happened in it."""

    seen: Counter[str]


class Episode(Protocol):
    """One world and its events."""

    world: World

    def run(self, events: int) -> None:
        """So many events, then peace until everybody is served. Raises what the world raises."""


def drive(new_episode: Callable[[random.Random], Episode], seed: int, events: int) -> Counter[str]:
    """Runs `events` events in episodes; what was seen. Raises what the world raises, with the episode's number as a note."""
    seen: Counter[str] = Counter()
    for number in range(-(-events // EVENTS_PER_EPISODE)):
        try:
            episode = new_episode(random.Random(seed * 100_003 + number))
            episode.run(EVENTS_PER_EPISODE)
        except Exception as error:
            error.add_note(f"episode {number} of seed {seed}")
            raise
        seen += episode.world.seen
    return seen


def main(new_episode: Callable[[random.Random], Episode], description: str | None) -> int:
    """The command line of a drive: prints how often each thing was seen."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for name, count in sorted(drive(new_episode, arguments.seed, arguments.events).items()):
        print(f"{count:8}  {name}")
    return 0
