"""A session outlives its process. Run it twice: python examples/resume.py [MODEL] [STORE]

Default: smollm2, ~/.agentkv. The second run loads the KV of the first and prefills its own new tokens alone.
"""

import asyncio
import sys

import agentkv


async def main(model: str = "smollm2", store: str = "~/.agentkv") -> None:
    decoding = agentkv.DecodingConfig(max_new_tokens=48, repetition_penalty=1.1)
    async with agentkv.open(model, store=store) as manager, manager.session("resume-example") as session:
        print(f"found the session at {session.head}")
        result = await session.step("Tell me something new about the sea.", decoding=decoding, expect=session.head)
        print(result.text)
        print(f"loaded {result.usage.loaded}, prefilled {result.usage.prefilled}; now at {session.head}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
