"""How long a model's steps take, op by op, beside what they must at least take."""
