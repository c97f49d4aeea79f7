"""The error of a setting that was asked for and did nothing."""

from __future__ import annotations


class NoEffectError(Exception):
    """Something that was asked for did not happen; the message says what and what happened instead."""
