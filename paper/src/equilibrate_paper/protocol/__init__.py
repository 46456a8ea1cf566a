"""The experiments of the paper as values: networks, schedules, runs, profiles and panels."""
