"""Published measurements of training runs, and what they were made with: to hold predictions against them."""
