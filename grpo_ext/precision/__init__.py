"""Loss scale, fixed-point sums, and reports of numbers that are not finite."""
