"""The data sets of the paper, and scikit-learn's digits for quick runs."""
