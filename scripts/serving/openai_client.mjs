// Asks a server with the `openai` package of npm. Usage: node openai_client.mjs ADDRESS
// A line of JSON for each check: {"name", "holds", "shown"}.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const check = (name, holds, shown = "") => console.log(JSON.stringify({ name, holds: Boolean(holds), shown }));

const messages = [{ role: "user", content: "What is gravity?" }];
const [{ id: model }] = (await client.models.list()).data;
const asked = { model, messages, temperature: 0, max_tokens: 48 };

const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
check("chat, whole", text.length > 0 && ["stop", "length"].includes(whole.choices[0].finish_reason), text);

let streamed = "";
let usage;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
check("chat, streamed", streamed === text);
check("usage of the stream", usage?.completion_tokens === whole.usage.completion_tokens);

// The package's own reader of streams, which puts the pieces together again.
const final = await client.chat.completions.stream(asked).finalChatCompletion();
check("chat, put together by the package", final.choices[0].message.content === text);

const aborted = await client.chat.completions.create({ ...asked, max_tokens: 1000, stream: true });
let pieces = 0;
for await (const _ of aborted) {
  pieces += 1;
  if (pieces === 3) aborted.controller.abort();
}
check("an aborted stream", pieces >= 3 && pieces < 1000, pieces);

const schema = { type: "object", required: ["sure"], additionalProperties: false, properties: { sure: { type: "boolean" } } };
const format = { type: "json_schema", json_schema: { name: "sure", strict: true, schema } };
const form = await client.chat.completions.create({ ...asked, response_format: format });
check("JSON of a schema", typeof JSON.parse(form.choices[0].message.content).sure === "boolean", form.choices[0].message.content);

const completion = await client.completions.create({ model, prompt: "Once upon a time", temperature: 0, max_tokens: 16, stop: ["."] });
check("completion with a stop", !completion.choices[0].text.includes("."), completion.choices[0].text);

for (const [name, kind, ask] of [
  ["a wrong value", OpenAI.BadRequestError, { ...asked, temperature: 9 }],
  ["no such model", OpenAI.NotFoundError, { ...asked, model: "none" }],
]) {
  const error = await client.chat.completions.create(ask).then(() => null, (error) => error);
  check(name, error instanceof kind, error?.message);
}
