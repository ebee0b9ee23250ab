// The Vercel AI SDK: an object by a schema, generated and streamed, and a tool that is called.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, tool } from "ai";
import { z } from "zod";

const server = createOpenAICompatible({
  name: "baton",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = server("baton-tiny");
const schema = z.object({ name: z.string().max(20), count: z.number().int() });
const asked = {
  model,
  schema,
  temperature: 0,
  prompt: "Answer as JSON with name, count: My friend Nils lives in Oslo and has 12 pens.",
};
const shape = (object) => `parsed ${typeof object.name} ${typeof object.count}`;

console.log(shape((await generateObject(asked)).object));
const stream = streamObject(asked);
let last;
for await (const partial of stream.partialObjectStream) last = partial;
console.log(shape(last));
const { toolCalls } = await generateText({
  model,
  temperature: 0,
  toolChoice: "required",
  prompt: "Please find the yellow box.",
  tools: {
    find_object: tool({
      description: "where an object is",
      inputSchema: z.object({ object: z.string().max(20), colour: z.string().max(20) }),
    }),
  },
});
for (const call of toolCalls) console.log("called", call.toolName, Object.keys(call.input).sort().join());
