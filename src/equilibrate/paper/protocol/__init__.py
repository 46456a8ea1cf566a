"""What is run: networks, runs, profiles and the panels they feed."""
