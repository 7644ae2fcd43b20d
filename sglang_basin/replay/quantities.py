"""Quantities as people write them on a command line: `60s`, `11/min`, `+250%`, `1/20`.

Each parser returns plain numbers in the unit its name states and raises `QuantityError` with the text it could not
read and an example of what it reads. argparse shows that message as it is.
"""

from __future__ import annotations

import argparse
import math
import re

_SECONDS = {
    "ms": 0.001,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


class QuantityError(argparse.ArgumentTypeError, ValueError):
    """A quantity that cannot be read; the message quotes it and shows the expected form."""


def duration_s(text: str) -> float:
    """Seconds from `90`, `90s`, `1.5m`, `500ms` or `1h`; a bare number means seconds."""
    match = re.fullmatch(_NUMBER + r"\s*([a-z]*)", text.strip())
    unit = match[2] or "s" if match else ""
    if match is None or unit not in _SECONDS:
        raise QuantityError(f"{text!r} is not a duration; write 90s, 1.5m, 500ms or 1h")
    return float(match[1]) * _SECONDS[unit]


def rate_per_s(text: str) -> float:
    """Events a second from `11/min`, `0.2/s` or `660/h`. Zero and negative rates are refused."""
    match = re.fullmatch(_NUMBER + r"\s*/\s*([a-z]+)", text.strip())
    if match is None or match[2] not in _SECONDS or float(match[1]) == 0:
        raise QuantityError(f"{text!r} is not a positive rate; write 11/min, 0.2/s or 660/h")
    return float(match[1]) / _SECONDS[match[2]]


def surge_extra(text: str) -> float:
    """The share added to the base rate, from `+250%` (2.5) or `-40%` (-0.4). Below -100 % is refused."""
    match = re.fullmatch(r"([+-]?)" + _NUMBER + r"\s*%", text.strip())
    if match is None:
        raise QuantityError(f"{text!r} is not a change of rate; write +250%")
    extra = float(match[2]) / 100 * (-1 if match[1] == "-" else 1)
    if extra < -1:
        raise QuantityError(f"{text!r}: a rate cannot fall by more than 100%")
    return extra


def scale_factor(text: str) -> float:
    """A positive factor from `1/20` or `0.05`."""
    match = re.fullmatch(_NUMBER + r"(?:\s*/\s*" + _NUMBER + r")?", text.strip())
    below = float(match[2]) if match and match[2] else 1.0
    value = float(match[1]) / below if match and below else 0.0
    if not 0 < value < math.inf:
        raise QuantityError(f"{text!r} is not a positive factor; write 1/20 or 0.05")
    return value


def token_range(text: str) -> tuple[int, int]:
    """The half-open range of token ids `LOW:HIGH`, at least 16 wide."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text.strip())
    if match is None or int(match[2]) - int(match[1]) < 16:
        raise QuantityError(f"{text!r} is not a range of at least 16 token ids; write 16:512")
    return int(match[1]), int(match[2])


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"\d{1,12}", text.strip()) or int(text) < 1:
        raise QuantityError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def format_duration(seconds: float) -> str:
    """`7m`, `1m30s`, `45s`: whole seconds, for titles and progress lines."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{value}{unit}" for value, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if value]
    return "".join(parts) or "0s"
