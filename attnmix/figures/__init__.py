"""Figures for papers, in one style, and the labels and colours of figures and page."""

from attnmix.core.caches import use_writable_caches

use_writable_caches()  # before matplotlib is imported
