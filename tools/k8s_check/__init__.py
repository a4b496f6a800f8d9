"""Checks rendered Kubernetes manifests for what schemas cannot see: references, what pods may do, and whom policies let through to whom."""
