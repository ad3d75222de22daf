"""Plans: lists of calls, recorded once, checked as they are recorded, written out as text and costed."""
