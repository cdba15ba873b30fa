"""Focus and dilution (arXiv 2605.01199): one layer of attention condenses, focuses, dilutes, and starts again."""

from fd_interp.papers.focus_dilution.claims import PAPER as PAPER
from fd_interp.papers.focus_dilution.cycle import cycle as cycle
from fd_interp.papers.focus_dilution.cycle import stages as stages
from fd_interp.papers.focus_dilution.panels import panels as panels
from fd_interp.papers.focus_dilution.panels import shown as shown
from fd_interp.papers.focus_dilution.panels import wide_figures as wide_figures
from fd_interp.papers.focus_dilution.population import predicted as predicted
from fd_interp.papers.focus_dilution.settings import SETTINGS as SETTINGS
from fd_interp.papers.focus_dilution.settings import ZIPF as ZIPF
from fd_interp.papers.focus_dilution.settings import claims_about as claims_about
from fd_interp.papers.focus_dilution.settings import controls as controls
from fd_interp.papers.focus_dilution.settings import probes as probes
from fd_interp.papers.focus_dilution.settings import probes_of_text as probes_of_text

TITLE = "Focus and dilution: the stages of learning in one layer of attention"
