"""From trials to an answer that holds: finals, checks of the winner, and the verdict."""
