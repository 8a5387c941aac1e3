"""Muon for factors with orthonormal rows: split masters, Gram-side orthogonalisation and retraction."""

from dormouse_kernels.muon.reference import (
    join_master,
    muon_factor_step,
    orthogonalize,
    orthonormality_error,
    retract,
    split_master,
)

__all__ = ["join_master", "muon_factor_step", "orthogonalize", "orthonormality_error", "retract", "split_master"]
