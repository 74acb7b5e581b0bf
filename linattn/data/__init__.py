"""Text as tokens: its sources, the memory-mapped files it is packed into, and the order in which it is read."""

from linattn.data.codec import ByteCodec as ByteCodec
from linattn.data.codec import Codec as Codec
from linattn.data.codec import TokenizerCodec as TokenizerCodec
from linattn.data.corpus import Corpus as Corpus
from linattn.data.corpus import corpus as corpus
from linattn.data.packed import PackedTokens as PackedTokens
from linattn.data.prepare import prepare as prepare
from linattn.data.shards import Prepared as Prepared
from linattn.data.shards import prepared as prepared
