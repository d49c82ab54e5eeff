"""A generated task: a date as people write it, to ISO 8601. "Sunday, 3 May 1998" becomes "1998-05-03"."""

import datetime
import functools

import numpy as np

from jaxformer.data.text import unit_hash

Pair = tuple[str, str]

MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
SHORT_MONTHS = ["Jan.", "Feb.", "Mar.", "Apr.", "May", "Jun.", "Jul.", "Aug.", "Sept.", "Oct.", "Nov.", "Dec."]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
FORMATS = (
    "{day} {month} {year}",
    "{month} {day}, {year}",
    "{month} {ordinal}, {year}",
    "{ordinal} {month} {year}",
    "the {ordinal} of {month}, {year}",
    "{weekday}, {day} {month} {year}",
    "{weekday}, {month} {day}, {year}",
    "{weekday} the {ordinal} of {month} {year}",
    "{year}, {month} {day}",
    "{day} {short} {year}",
    "{short} {day}, {year}",
    "{weekday:.3}, {day} {short} {year}",
    "{day}.{number}.{year}",  # dots: day first; slashes: month first; year first with either order unmistakable
    "{number}/{day}/{year}",
    "{year}/{number:02}/{day:02}",
)
"""Every rendering says one date only, so that each source has one right answer."""

_FIRST = datetime.date(1900, 1, 1)
_LAST = datetime.date(2099, 12, 31)
_CASES = (str, str, str, str.lower, str.upper)
_HELD_OUT = 0.01  # of the dates for validation, and as much again for the test


@functools.cache
def splits() -> tuple[list[datetime.date], list[datetime.date], list[datetime.date]]:
    """Dates of 1900 to 2099 for training, validation (1 %) and test (1 %), by a hash of the date."""
    train: list[datetime.date] = []
    validation: list[datetime.date] = []
    test: list[datetime.date] = []
    for i in range((_LAST - _FIRST).days + 1):
        date = _FIRST + datetime.timedelta(i)
        hashed = unit_hash(date.isoformat())
        (test if hashed < _HELD_OUT else validation if hashed < 2 * _HELD_OUT else train).append(date)
    return train, validation, test


def render(date: datetime.date, form: str) -> str:
    """``date`` in one of ``FORMATS``."""
    return form.format(
        day=date.day,
        ordinal=_ordinal(date.day),
        number=date.month,
        month=MONTHS[date.month - 1],
        short=SHORT_MONTHS[date.month - 1],
        weekday=WEEKDAYS[date.weekday()],
        year=date.year,
    )


def draw(date: datetime.date, rng: np.random.Generator) -> Pair:
    """(source, target): ``date`` in a random format and case, and in ISO."""
    form, case = FORMATS[rng.integers(len(FORMATS))], _CASES[rng.integers(len(_CASES))]
    return case(render(date, form)), date.isoformat()


def distinct(dates: list[datetime.date], count: int) -> list[Pair]:
    """``count`` pairs of different sources, always the same ones."""
    rng = np.random.default_rng(0)
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        source, target = draw(dates[rng.integers(len(dates))], rng)
        pairs[source] = target
    return list(pairs.items())


def _ordinal(day: int) -> str:
    suffix = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{suffix}"
