"""Balanced spherical k-means: one centroid per decode group, none with more than its share of requests."""

from coterie.clustering.assignment import Labels, balanced_assignment
from coterie.clustering.kmeans import (
    Clustering,
    align_centroids,
    balanced_kmeans,
    centroids_of,
    kmeans,
    refit,
)

__all__ = [
    "Clustering",
    "Labels",
    "align_centroids",
    "balanced_assignment",
    "balanced_kmeans",
    "centroids_of",
    "kmeans",
    "refit",
]
