"""Execution of the paper's runs and of single training runs."""
