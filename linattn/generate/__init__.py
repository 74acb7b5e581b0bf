"""Generation: sampling, and decoding with a state of constant size."""

from linattn.generate.batch import complete as complete
from linattn.generate.beams import Beam as Beam
from linattn.generate.beams import beam_search as beam_search
from linattn.generate.pool import Pool as Pool
from linattn.generate.pool import PoolFullError as PoolFullError
from linattn.generate.prefill import prefill as prefill
from linattn.generate.request import Request as Request
from linattn.generate.sampling import Sampling as Sampling
from linattn.generate.sampling import probabilities as probabilities
from linattn.generate.sampling import sample as sample
from linattn.generate.stream import stream as stream
from linattn.generate.text import stream_text as stream_text
from linattn.generate.tokens import Tokens as Tokens
