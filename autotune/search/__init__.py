"""What can be tried and what to try next: space, rules, history, proposals, and the Optuna study."""
