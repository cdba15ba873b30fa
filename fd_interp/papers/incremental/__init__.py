"""Incremental sparse attention (arXiv 2602.19143): heads compete for the most important lag, then part one by one."""

from fd_interp.papers.incremental.acquisition import stages as stages
from fd_interp.papers.incremental.claims import PAPER as PAPER
from fd_interp.papers.incremental.panels import panels as panels
from fd_interp.papers.incremental.panels import shown as shown
from fd_interp.papers.incremental.panels import wide_figures as wide_figures
from fd_interp.papers.incremental.population import predicted as predicted
from fd_interp.papers.incremental.settings import SETTINGS as SETTINGS
from fd_interp.papers.incremental.settings import claims_about as claims_about
from fd_interp.papers.incremental.settings import probes as probes

TITLE = "Incremental learning of sparse attention: competition, cooperation, and the ladder"
