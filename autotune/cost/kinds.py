"""Names for the kinds of operators and of memory that a tape tells apart; without torch, for those who only read."""

# What an operator is, for the time it takes.
# A transfer moves bytes between the device and the host.
VIEW, CONTRACTION, NORMALISATION, ELEMENTWISE, TRANSFER = range(5)

# What a storage holds. Those of weights are not on the tape: they are there all the time.
# A fresh gradient is one that has just been computed: where there was one before, it is added to that and ends.
ACTIVATION, TEMPORARY, GRADIENT, FRESH = range(4)
