"""Mathematical operations on tensors, without modules and configurations."""

from linattn.ops.checks import debug as debug
from linattn.ops.dispatch import explain as explain
from linattn.ops.inputs import Backend as Backend
from linattn.ops.inputs import Form as Form
from linattn.ops.linear_attention import linear_attention as linear_attention
from linattn.ops.long_conv import long_conv as long_conv
from linattn.ops.long_conv import lti as lti
from linattn.ops.pattern import attend as pattern_attention  # noqa: F401
from linattn.ops.scan import diagonal_scan as diagonal_scan
from linattn.ops.scan import running_max as running_max
from linattn.ops.selective_scan import selective_scan as selective_scan
