"""From records to numbers, claims and verdicts."""
