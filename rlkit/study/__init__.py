"""What the study path teaches and checks with: exercises, derivations, widgets, the rollout browser."""
