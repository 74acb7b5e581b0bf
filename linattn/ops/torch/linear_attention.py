"""The portable forms by name. (Placeholder until the chunk form stands: the definition serves.)"""

from linattn.ops.reference.linear_attention import linear_attention as _reference

FORMS = {"parallel": _reference, "chunk": _reference, "recurrent": _reference}
