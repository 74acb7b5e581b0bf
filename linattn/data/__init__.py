"""Text as tokens: where it comes from, how it is packed into a memory-mapped file, and in which order it is read."""

from linattn.data.codec import ByteCodec as ByteCodec
from linattn.data.codec import Codec as Codec
from linattn.data.codec import TokenizerCodec as TokenizerCodec
from linattn.data.corpus import Corpus as Corpus
from linattn.data.corpus import corpus as corpus
from linattn.data.packed import PackedTokens as PackedTokens
