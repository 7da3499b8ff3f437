"""Text from a decoder: sampling, streaming, and finding the model to do it with.

```python
from pathlib import Path
from megalith.generate import Sampling, load_for_generation, stream

model, tokenizer, recipe = load_for_generation(Path("runs/gpt-stdlib"))
for piece in stream(model, tokenizer, "def read(", Sampling(temperature=0.8, top_p=0.95)):
    print(piece, end="", flush=True)
```
"""

from megalith.generate.decode import generate, generate_tokens, stream
from megalith.generate.load import load_for_generation
from megalith.generate.sampling import Sampling, next_token

__all__ = [
    "Sampling",
    "generate",
    "generate_tokens",
    "load_for_generation",
    "next_token",
    "stream",
]
