"""What several decisions compute from statistics."""
