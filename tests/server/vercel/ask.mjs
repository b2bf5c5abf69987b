// Asks a server all that the test looks at, and prints one JSON object. Usage: node ask.mjs URL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const provider = (changes) =>
  createOpenAICompatible({
    name: "kvboost_hf",
    baseURL: process.argv[2],
    apiKey: "key",
    includeUsage: true,
    supportsStructuredOutputs: true,
    ...changes,
  });
const asked = {
  model: provider()("reader"),
  system: "You read documents and answer questions about them.",
  prompt: "Anna lives in Oslo. She plays the piano.\n\nWhat does Anna play?",
  temperature: 0,
  maxRetries: 0,
};
const lamp = z.object({ on: z.boolean(), at: z.enum(["Oslo", "Rome"]) });
const look = tool({
  description: "Look at a thing.",
  inputSchema: z.object({ at: z.enum(["lamp", "door"]) }),
  execute: async ({ at }) => `The ${at} is red.`,
});
const called = { ...asked, tools: { look }, toolChoice: "required" };

async function pieces(stream) {
  const found = [];
  for await (const piece of stream) found.push(piece);
  return found;
}

async function failure(changes) {
  try {
    await generateText({ ...asked, ...changes });
  } catch (error) {
    return { status: error.statusCode, message: error.message, code: error.data?.error?.code };
  }
}

const told = {};
const chat = await generateText(asked);
told.chat = { text: chat.text, reason: chat.finishReason };
const stream = streamText(asked);
told.stream = { pieces: await pieces(stream.textStream), usage: await stream.usage };
const call = await generateText(called);
told.call = { name: call.toolCalls[0].toolName, input: call.toolCalls[0].input, reason: call.finishReason };
told.named = (await generateText({ ...called, toolChoice: { type: "tool", toolName: "look" } })).toolCalls[0].input;
const calling = streamText(called);
await pieces(calling.fullStream);
told.streamedCall = (await calling.toolCalls)[0].input;
const messages = [{ role: "user", content: asked.prompt }, ...call.response.messages];
told.afterwards = (await generateText({ ...called, prompt: undefined, messages, toolChoice: "none" })).text;
told.object = (await generateText({ ...asked, output: Output.object({ schema: lamp }) })).output;
const object = streamObject({ ...asked, schema: lamp });
await pieces(object.partialObjectStream);
told.streamedObject = await object.object;
const both = { ...called, output: Output.object({ schema: lamp }) };
told.callBesideObject = (await generateText(both)).toolCalls[0].input;
const either = await generateText({ ...both, toolChoice: "auto", stopWhen: stepCountIs(1) });
told.callOrObject = either.toolCalls[0]?.input ?? either.output;
told.badKey = await failure({ model: provider({ apiKey: "other" })("reader") });
told.unknownModel = await failure({ model: provider()("writer") });
told.tooLong = await failure({ prompt: "word ".repeat(9000) });
console.log(JSON.stringify(told));
