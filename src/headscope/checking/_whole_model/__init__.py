"""check_model: questions to a whole model, each answered by a few forward passes."""
