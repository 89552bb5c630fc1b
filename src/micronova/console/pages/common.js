// What the consoles share: the token, what it stands for, the state that is shown, and the WebSocket.

const element = (id) => document.getElementById(id);

element("again").addEventListener("click", () => location.reload());
element("full-screen").addEventListener("click", () => {
  if (document.fullscreenElement) document.exitFullscreen();
  else document.documentElement.requestFullscreen();
});

export function show(state, quality = "") {
  element("state").textContent = state;
  element("state").className = quality;
}

export function fail(message) {
  show("not connected", "bad");
  element("message").textContent = message;
  element("message").hidden = false;
  element("again").hidden = false;
}

// A link has the token itself (?token=…), or the path of the WebSocket with the token in it (?path=…), as noVNC's have.
function token() {
  const query = new URLSearchParams(location.search);
  const path = query.get("path") ?? "";
  return query.get("token") ?? new URLSearchParams(path.slice(path.indexOf("?") + 1)).get("token") ?? "";
}

async function ask() {
  const answer = await fetch(`session?${new URLSearchParams({ token: token() })}`, { cache: "no-store" });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said.server;
}

// Say why there is no connection: the proxy knows more about the token than the browser about the WebSocket. The
// hint is for a server that is still there.
export async function explain(reason, hint = "") {
  try {
    await ask();
    fail(`${reason || "The connection to the console was lost."} ${hint}`.trim());
  } catch (error) {
    fail(reason || error.message);
  }
}

// Return the WebSocket's address of the console that the token stands for; null, and a message is shown, if there is none.
export async function locate(protocol) {
  try {
    const server = await ask();
    if (server.protocol !== protocol) {
      throw new Error(`This link is for the server's ${server.protocol} console: ask for one of the other kind.`);
    }
    document.title = server.name;
    element("server").textContent = server.name;
  } catch (error) {
    fail(error.message);
    return null;
  }
  const address = new URL("websockify", location.href);
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  address.search = new URLSearchParams({ token: token() });
  return address;
}

// Connect to the console; null, and a message is shown, if that cannot be.
export async function connect(protocol) {
  const address = await locate(protocol);
  if (!address) return null;
  const socket = new WebSocket(address, ["binary"]);
  socket.binaryType = "arraybuffer";
  socket.addEventListener("close", (event) => explain(event.reason));
  return socket;
}
