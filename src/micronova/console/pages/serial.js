// A serial port, shown by xterm.js. A serial port has no window size, so there are always 80 columns and 24 lines.

import { connect, show } from "./common.js";

const socket = await connect("serial");
if (socket) {
  const terminal = new Terminal({ cols: 80, rows: 24, scrollback: 5000, cursorBlink: true, fontSize: 16, rendererType: "dom" });
  terminal.open(document.getElementById("terminal"));
  const bytes = new TextEncoder();
  const text = new TextDecoder(); // a character may be split between two messages
  const type = (data) => {
    if (socket.readyState === WebSocket.OPEN) socket.send(bytes.encode(data));
  };
  if (terminal.onData) terminal.onData(type);
  else terminal.on("data", type); // before xterm.js 4
  // A guest that waits for input shows nothing until something is typed.
  const hint = document.getElementById("hint");
  socket.addEventListener("open", () => {
    show("connected", "good");
    hint.hidden = false;
    terminal.focus();
  });
  socket.addEventListener("message", (event) => {
    hint.hidden = true;
    terminal.write(text.decode(event.data, { stream: true }));
  });
  socket.addEventListener("close", () => { hint.hidden = true; });
}
