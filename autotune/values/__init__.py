"""The values that the other packages exchange: frozen, checked when made, written as JSON."""
