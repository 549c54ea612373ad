"""Maps: nearest neighbours, layouts, and quality scores."""

from attnmix.core.caches import use_writable_caches
from attnmix.core.extras import require_extra

require_extra("page", "UMAP")
use_writable_caches()  # before numba is imported
