"""Clustering heads (arXiv 2410.24050): a head learns what the task cannot tell apart, then a classifier reads it."""

from fd_interp.papers.clustering.circuits import stages as stages
from fd_interp.papers.clustering.claims import PAPER as PAPER
from fd_interp.papers.clustering.panels import panels as panels
from fd_interp.papers.clustering.panels import shown as shown
from fd_interp.papers.clustering.panels import wide_figures as wide_figures
from fd_interp.papers.clustering.population import predicted as predicted
from fd_interp.papers.clustering.settings import SETTINGS as SETTINGS
from fd_interp.papers.clustering.settings import claims_about as claims_about
from fd_interp.papers.clustering.settings import probes as probes

TITLE = "Clustering heads: the representation, then the classifier"
