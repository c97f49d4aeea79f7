"""The base of every value type: frozen, keyword-only, unknown fields refused."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """An immutable value that checks itself when made and can be written as JSON.

    Raises:
        pydantic.ValidationError: A field is missing, unknown or of the wrong type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="constants")

    def digest(self, length: int = 10, *, leave_out: frozenset[str] = frozenset()) -> str:
        """Return a short hash of the canonical JSON without the fields `leave_out`: equal values, equal digests."""
        fields = self.model_dump(mode="json", exclude=set(leave_out))
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:length]
