"""How much room ranks leave for each other's ids."""

from __future__ import annotations

from autoshard.runtime.input_dist import _room


def test_room_follows_what_was_sent() -> None:
    assert _room(0, 1600) == 1700  # a sixteenth more than the first message
    assert _room(1700, 1650) == 1700  # kept while messages fit
    assert _room(1700, 1701) == 1807  # grows with one that does not
    assert _room(1700, 849) == 902  # shrinks when half of it is empty
    assert _room(1700, 0) == 0
    assert _room(0, 0) == 0
