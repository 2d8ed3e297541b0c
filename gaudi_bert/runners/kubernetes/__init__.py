"""Run the stages of a pipeline as Jobs on a Kubernetes cluster."""
