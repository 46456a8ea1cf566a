"""The paper, runnable: data, models, protocols, figures, claims."""
