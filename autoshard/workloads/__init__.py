"""Workloads: table lists with their id streams, published, generated or measured.

Importing the package registers the workloads of `registry.WORKLOADS`.
"""

from autoshard.workloads import dlrm_datasets as dlrm_datasets
from autoshard.workloads import dlrm_tables as dlrm_tables
from autoshard.workloads import laptop as laptop
from autoshard.workloads import movielens as movielens
from autoshard.workloads import presets as presets
from autoshard.workloads import production as production
from autoshard.workloads import traces as traces
