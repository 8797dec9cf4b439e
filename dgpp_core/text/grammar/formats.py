"""Values of the schema keyword ``format``, as regular expressions over the whole string.

RFC 3339 dates are exact: a 29 February has a leap year. Leap seconds are left out, because few libraries read them.
"""

from __future__ import annotations

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
# Divisible by 4, but by 100 only if by 400; not 0000.
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = r"(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,40}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = r"[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_H16}:){{7}}{_H16}",
        *(rf"(?:{_H16}:){{{n}}}:(?:{_H16}(?::{_H16}){{0,{6 - n}}})?" for n in range(1, 7)),
        rf"(?:{_H16}:){{7}}:",
        rf"::(?:{_H16}(?::{_H16}){{0,6}})?",
    ]
)
_HEX = "[0-9a-fA-F]"
_URI_CHAR = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_DAYS}(?:T{_CLOCK})?|T{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}{{1,30}}(?:\.{_ATOM}{{1,10}}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,4}})?(?:/{_URI_CHAR}*)*|{_URI_CHAR}+(?:/{_URI_CHAR}*)*)"
    rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?",
}
"""Lengths are bounded so that a match keeps within its format: a host name has 253 characters at most, a mailbox 64."""


def pattern_of(name: str) -> str | None:
    """The pattern of a format, or None for one that is not known."""
    form = FORMATS.get(name)
    return None if form is None else f"^(?:{form})$"
