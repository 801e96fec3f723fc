// The server.

async function call(path, body, signal) {
  for (;;) {
    const key = store.get("key", "");
    const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(body && { "Content-Type": "application/json" }) };
    const reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal })
      .catch(() => { throw new Error("The server does not answer."); });
    if (reply.ok) return reply;
    if (reply.status === 401 && await askForKey()) continue;
    const { error } = await reply.json().catch(() => ({}));
    throw new Error(error?.message ?? `The server answered ${reply.status}.`);
  }
}

function askForKey() {
  return new Promise((resolve) => {
    const dialog = $("key-dialog");
    dialog.addEventListener("close", () => {
      if (dialog.returnValue === "use") store.set("key", $("key").value);
      resolve(dialog.returnValue === "use");
    }, { once: true });
    dialog.returnValue = "";
    if (!dialog.open) dialog.showModal();
  });
}

async function* events(reply) {
  // Safari has no `for await` over a stream
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const read = () => reader.read().catch(() => { throw new Error("The connection to the server is lost."); });
  let rest = "";
  try {
    for (let part = await read(); !part.done; part = await read()) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const progress = line.match(/^: prompt (\d+)\/(\d+)/);
        if (progress) yield { progress: { done: +progress[1], total: +progress[2] } };
        if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // the reader left before the end, or the stream failed
  }
}

